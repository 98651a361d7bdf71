"""--profile: the numbers stay, the trace opens, and the table is of the steps that it names."""

import json

SMALL = ["--num-samples", 250, "--epochs", 4, "--batch-size", 10, "--no-pictures"]


def test_a_profile_changes_no_number_and_leaves_a_trace(tmp_path, fork_main):
    out, num = {}, 4
    more = ["--batch-size", 50, "--accumulate", 2, "--num-workers", 1]
    for name, flags in {"with": ["--profile", 4], "without": []}.items():
        words = [*SMALL, *more, *flags, "--run-dir", tmp_path / name]
        done = fork_main("train_regression.py", *words)
        assert done.codes == [0], done.output
        out[name] = done.output
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    assert f"profile      of {num} steps\n" in out["with"] and "aten::" in out["with"]
    events = json.loads((tmp_path / "with" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("Optimizer.step#AdamW.step") == num
    assert not (tmp_path / "without" / "trace.json").exists()
