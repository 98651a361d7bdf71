"""The cost model is consistent with itself."""

import pytest
from conftest import ROOT

from benchmarks import scaling_model as model


def test_the_table_of_the_page_is_what_the_program_prints(capsys):
    model.main([])
    assert capsys.readouterr().out in (ROOT / "docs" / "scaling.md").read_text()


def test_sharded_weights_are_gathered_twice_and_gradients_go_half_the_way():
    """Of float32 weights and gradients a ring sends 3 (n - 1) / n instead of 2 (n - 1) / n."""
    talk = []
    for gathers in range(3):
        cluster = model.Cluster(gathers=gathers, bytes_per_weight=4, overlap=0, jitter=0)
        seconds, alone = model.step_seconds(cluster, model.WORKLOADS["wide"], 64)
        talk.append(seconds - alone)
    assert talk[1:] == pytest.approx([talk[0], 1.5 * talk[0]])
