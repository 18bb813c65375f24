"""The planning table is what the arithmetic gives, and the arithmetic counts parameters right."""

from pathlib import Path

from recipes.scaling import SHAPES, Shape, table


def test_parameters_of_a_model_whose_conversion_was_counted():
    smollm2 = Shape("SmolLM2-135M", 49152, 576, 30, 9, 3, 1536, tied=True, gpus=1)
    assert smollm2.parameters == 134_515_008 and smollm2.student_parameters == 139_658_958


def test_parameters_of_published_models():
    assert [round(shape.parameters / 1e9, 2) for shape in SHAPES] == [1.24, 8.03, 70.55]


def test_the_page_holds_the_table():
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    for row in table(0.4, 989e12, 2.5, 1e9):
        assert row in page
