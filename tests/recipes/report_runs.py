"""Runs of every kind that the report knows, as small as they can be, some under hostile names."""

import json

from convert import convert

HOSTILE = "<script>alert(1)</script> $x_ & \"q\" 'a'"


def evaluation(model, kl=0.3):
    spans = [(0, 64), (64, 128), (128, 256)]
    return {
        "model": str(model), "teacher": "T", "settings": {}, "commit": "abc1234",
        "text": [{
            "name": "web", "length": 256, "sequences": 4, "kl": {"mean": kl, "interval": 0.03}, "perplexity": 44.0,
            "teacher_perplexity": 36.0, "perplexity_ratio": 44 / 36, "agreement": 0.7,
            "by_position": [{"start": a, "stop": b, "kl": kl, "perplexity": 50.0, "teacher_perplexity": 40.0,
                             "agreement": 0.7} for a, b in spans],
        }],
        "recall": [{"probe": "passkey", "length": length, "distance": distance, "model": 0.5, "teacher": 1.0,
                    "standard_error": 0.1, "samples": 20} for length in (64, 128) for distance in (None, 32)],
        "generation": {"greedy_agreement": 0.4, "repetition": 0.1, "teacher_repetition": 0.05,
                       "instructions": {"model": 0.4, "teacher": 0.6, "count": 10},
                       "answers": [{"prompt": "Who?", "model": HOSTILE, "teacher": "Me."}]},
        "tasks": [{"task": "arc_easy", "metric": "acc", "model": 0.45, "teacher": 0.5, "chance": 0.25,
                   "relative": 0.8, "standard_error": 0.02, "documents": 100}],
        "speed": [{"which": which, "batch": 1, "context": context, "prefill_tokens_per_second": 300.0,
                   "decode_tokens_per_second": 12.0 if which == "model" else 8.0, "seconds_per_token": 0.1,
                   "cache_bytes": 1000 * context} for which in ("model", "teacher") for context in (512, 1024)],
    }  # fmt: skip


def write_runs(root, teacher):
    """A run of every kind, as small as it can be; the models are real."""
    convert(str(teacher), root / "hybrid", attention_layers="1,3", align="none")
    convert(str(teacher), root / "other", attention_layers="3", align="none")
    files = {
        "hybrid/evaluation.json": evaluation(root / "hybrid"),
        "other/evaluation.json": evaluation(root / "other", 0.9),
        "hybrid/alignment.json": {
            "text": "t.jsonl", "tokens": 512, "sequence_length": 64,
            "layer_scores": {str(i): {"kl": 0.1 * i, "recall": i - 1.0} for i in range(4)},
            "held_out_error": {"0": {"decay": 0.5, "ridge": 1e-3, "mapped": 40.0, "solved": 0.5, "refined": 0.4},
                               "2": {"decay": 0.5, "ridge": 1e-3, "mapped": 60.0, "solved": 0.6, "refined": 0.5}},
            "stages": [{
                "hidden_state_alignment": {"tokens": 128, "settings": {"target": "mixer"},
                                           "layers": {"0": [0.4, 0.3], "2": [0.5, 0.4]}},
                "distillation": {"tokens": 256, "held_out_kl_before": 0.5, "held_out_kl_after": 0.4},
            }],
        },
        "hybrid/training.json": [{
            "stage": "SFT", "teacher": "T", "data": "chat", "settings": {}, "before": {}, "after": {}, "tokens": 300,
            "log": [{"step": 0, "eval_loss": 1.2, "eval_kl": 0.9}]
            + [{"step": i, "loss": 1.0 / i, "kl": 0.5 / i, "num_tokens": 100 * i} for i in (1, 2, 3)],
        }],
        "layers/scores.json": {
            "scores": {str(i): {"kl": 0.1 * i, "recall": 0.5 * i} for i in range(4)},
            "teacher": {"kl": 0.0, "copy_accuracy": 0.9},
            "placements": [{"placement": way, "attention": share, "replaced": [0, 2], "kl": 0.5 - share / 4,
                            "copy_accuracy": share} for way in ("uniform", "kl+recall, 3 rounds")
                           for share in (0.5, 0.25)],
        },
        "heads/heads.json": {
            "window": 8, "scores": [[0.1, 0.9], [0.2, 0.3]], "ranked": [[0, 1], [1, 1]], "teacher_bytes": 4000,
            "teacher": {"loss": 0.1, "copy": 0.9},
            "kept": [{"kept": k, "loss": 1.0, "copy": 0.1 * k, "bytes": 1000 + 500 * k} for k in (0, 1, 2)],
        },
        "bench/results.json": {
            "targets": [{"name": "scan over attention at 8k", "value": 13.0, "target": 4.0, "met": True}],
            "scan": [{"heads": 9, "length": n, "scan_ms": n / 100, "sdpa_ms": n * n / 1e5, "sdpa_over_scan": n / 1e3,
                      "relative_error": 1e-7} for n in (512, 2048)],
        },
        "pipeline/results.json": {
            "steps": [{"name": name, "kl": kl, "perplexity": 30.0, "kl_on_answers": kl, "reward_accuracy": None,
                       "margin": 0.0} for name, kl in (("teacher", 0.0), ("hybrid", 0.5), ("sft", 0.3))],
            "pulled": {"question": "Why?", "answer": HOSTILE},
        },
        "study/approximation.json": {
            "norm": 12.0, "num_matrices": 2, "tokens": 64, "matrices": [{}, {}], "lower_bound": {"2": 0.1, "4": 0.05},
            "distance": {"toeplitz": 11.0, "ssd": {"2": 0.5, "4": 0.2}, "ssm": {"2": 0.3, "4": 0.1}},
        },
        "swap/swap.json": {"layers": [0, 2], "rows": {"ssd, stage 2": {
            "kl": 0.3, "kl_95": 0.1, "error": 0.2, "perplexity": 40.0, "copy": 0.5}}},
    }  # fmt: skip
    for name, data in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(json.dumps(data))
    ladder = [
        {"row": row, "attention": share, "layers": [0], "tokens": tokens_, "seconds": 1, "kl": kl * (2 - share),
         "kl_95": 0.05, "copy": share, "top1": 0.7, "perplexity_ratio": 1.2,
         "kl_by_position": {"0-256": kl, "256-512": kl + 0.1}}
        for row, tokens_, kl in (("window 8 + 4 sinks", 0, 0.1), ("copy", 0, 15.0), (HOSTILE, 512, 0.4),
                                 ("closed form + stage 2", 1024, 0.3))
        for share in (0.5, 0.25)
    ]  # fmt: skip
    window = [{"row": row, "bytes": size, "layers": [0, 1], "seconds": 0, "kl": 1e4 / size, "kl_95": 0.01, "copy": 0.1}
              for row, size in (("window 8 + 4 sinks", 20000), ("window 16 + 4 sinks", 40000),
                                ("mixer beside window 8 + 4 sinks", 30000))]  # fmt: skip
    for name, rows in (("ladder", ladder), ("window", window)):
        (root / name).mkdir()
        (root / name / "results.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    state = {"log_history": [{"step": i, "loss": 1.0 / i} for i in (1, 2, 3)]}
    for step in (5, 10):
        folder = root / "ladder" / "work" / "closed form + stage 3 0.5" / ("0" * 16) / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps(state if step == 10 else {"log_history": []}))
    (root / "ladder" / "arguments.json").write_text(json.dumps({"stage3_tokens": "300"}))
