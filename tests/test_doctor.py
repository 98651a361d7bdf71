"""The doctor finds what keeps processes from training together."""

import pytest
from conftest import linux_only

# A doctor whose process 1 is ill in the way that argv[0] names.
PATIENT = """
import os, time
import torch
from trainkit.launch import nodes
from trainkit.tools import doctor

def main(argv):
    illness = argv[0]
    nodes.SHOWN_SECONDS, doctor.GLOO_SECONDS = 0.5, 3
    doctor.SIZES = (4096,)
    if os.environ["RANK"] == "1":
        if illness == "network":
            find = doctor.find_gloo_problem
            doctor.find_gloo_problem = lambda accelerator: (  # read whenever a group is opened
                os.environ.update(GLOO_SOCKET_IFNAME="nosuch") or find(accelerator))
        if illness == "sum":
            real = torch.distributed.all_reduce
            torch.distributed.all_reduce = lambda tensor, **how: real(tensor.mul_(2), **how)
        if illness == "axis":
            find = doctor.find_wrong_sum
            doctor.find_wrong_sum = lambda accelerator, num_bytes, axis="", group=None: (
                axis == "dp_shard" and (accelerator.wait_for_everyone() or time.sleep(9) or 1 / 0)
                or find(accelerator, num_bytes, axis, group))
    doctor.main(argv[1:])
"""
# Other illnesses: tests/test_startup.py, test_launch.py. Here the sentence that names one.
ILL = [
    ("network", "the gloo group that training opens beside gloo failed on node 0 ("),
    ("sum", "problem: an all-reduce of 4096 bytes is wrong on processes [0, 1]"),
]


@linux_only
@pytest.mark.parametrize("illness, sentence", ILL)
def test_an_illness_is_named(illness, sentence, fork_main, tmp_path):
    done = fork_main(PATIENT, illness, world=2, cwd=tmp_path)
    assert done.returncode == 1 and sentence in done.output, done.output
    assert "ready to train" not in done.output


@pytest.mark.parametrize("world", [1, 2])
def test_healthy_processes_are_measured_and_called_healthy(fork_main, tmp_path, world):
    """Also where the folder of the runs is not there yet, as in a new clone."""
    flags = "--run-dir", tmp_path / "runs" / "mnist"
    done = fork_main("trainkit.tools.doctor", *flags, world=world)
    assert done.codes == [0] * world, done.output
    lines = done.stdout.splitlines()
    assert sum(line.startswith("all-reduce of ") for line in lines) == 3 * (world - 1)
    assert lines[-1] == "ready to train" and not [*tmp_path.rglob(".tmp-*")]
