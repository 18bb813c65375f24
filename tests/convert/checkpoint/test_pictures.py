"""Pictures of a page: whose colour is whose, and a legend that leaves room for the lines."""

from convert.checkpoint.pictures import LINE_COLORS, TEACHER_COLOR, positions_picture, totals_picture


def test_the_teacher_has_its_own_colour():
    drawn = totals_picture({"teacher": [2, 4], "hybrid": [2, 3], "int8 cache": [2, 4]}, [9, 10], None)
    colours = {line.get_label(): line.get_color() for line in drawn.axes[0].lines}
    assert colours["teacher"] == TEACHER_COLOR
    assert len(set(colours.values())) == 3


def test_a_long_legend_stands_above_the_lines():
    """As many methods as a comparison with real caches has; more than there are colours."""
    names = [f"window, int8, as a hybrid of {share} %" for share in range(2 * len(LINE_COLORS))]
    drawn = positions_picture(dict.fromkeys(names, [(512, 0.1), (1024, 0.2)]))
    drawn.draw_without_rendering()
    legend, lines = drawn.legends[0].get_window_extent(), drawn.axes[0].get_window_extent()
    assert len(drawn.legends[0].get_texts()) == len(names)
    assert legend.y0 >= lines.y1
    assert 0 <= legend.x0
    assert legend.x1 <= drawn.bbox.x1
