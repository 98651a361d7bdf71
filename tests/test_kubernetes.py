"""docs/kubernetes/train.yaml: what a cluster would read, and what its pods would run."""

import itertools
import os
import subprocess
import sys

import conftest
import pytest
import yaml
from faults import digests

from trainkit.errors import EXIT_FAILURE, EXIT_STOPPED, EXIT_TARGET_MISSED, EXIT_USAGE

APPLIED = conftest.ROOT / conftest.typed("kubectl apply")[-1]
SERVICE, JOB = yaml.safe_load_all(APPLIED.read_text())
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
MIRRORED = yaml.safe_load(APPLIED.with_name("train-mirror.yaml").read_text())

# bash -c UP NET JOB SERVICE: two hosts joined by a cable, with the names that the Service gives.
UP = """
ip link add $0-0 type veth peer name $0-1
for n in 0 1; do
  ip netns add $0-$n && ip link set $0-$n netns $0-$n
  ip -n $0-$n addr add 10.78.0.$n/31 dev $0-$n
  ip -n $0-$n link set $0-$n up && ip -n $0-$n link set lo up
  mkdir -p /etc/netns/$0-$n && echo 127.0.0.1 localhost > /etc/netns/$0-$n/hosts
  for m in 0 1; do echo 10.78.0.$m $1-$m.$2 $1-$m; done >> /etc/netns/$0-$n/hosts
done"""
DOWN = "for n in 0 1; do ip netns del $0-$n; rm -r /etc/netns/$0-$n; done"
# bash -c IMAGE FOLDER: what the Dockerfile copies into the image.
IMAGE = """
mkdir $0; sed -n 's/^COPY //p' docs/kubernetes/Dockerfile | while read -a words; do
  last=$((${#words[@]} - 1)); cp -r "${words[@]:0:last}" "$0/${words[last]}"
done"""


def test_the_yaml_is_one_that_a_cluster_takes_and_its_names_and_exit_codes_fit():
    assert SERVICE["metadata"]["name"] == POD["subdomain"]
    assert SERVICE["spec"]["selector"]["job-name"] == JOB["metadata"]["name"]
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules[:2]] == [
        ("FailJob", [EXIT_USAGE, EXIT_TARGET_MISSED]),
        ("Ignore", [EXIT_STOPPED]),
    ]
    assert MIRRORED["spec"]["podFailurePolicy"] == JOB["spec"]["podFailurePolicy"]
    validator = pytest.importorskip("kubernetes_validate")
    for document, version in itertools.product((SERVICE, JOB, MIRRORED), ("1.31", "1.37")):
        validator.validate(document, version, strict=True)


@pytest.fixture
def start_pods(tmp_path):
    """Start what the kubelets would, each pod on a host of its own, with more flags."""
    net, image, job = f"k{os.getpid()}", tmp_path / "image", JOB["metadata"]["name"]
    subprocess.run(["bash", "-ec", IMAGE, image], cwd=conftest.ROOT, check=True)
    try:
        subprocess.run(["bash", "-ec", UP, net, job, POD["subdomain"]], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need Linux, root and the command ip")

    def start(index: int, flags: str) -> subprocess.Popen:
        env = [f"{variable['name']}={variable['value']}" for variable in CONTAINER["env"]]
        words = " ".join(["exec env", *env, *CONTAINER["command"], *CONTAINER["args"], flags])
        for old, new in {
            " python ": f" {sys.executable} ",
            "$(JOB_COMPLETION_INDEX)": str(index),
            "2node_16gpu_fp16.yaml": "2node_4cpu.yaml --num_processes 2",
            "/runs": str(tmp_path),
        }.items():
            assert old in words
            words = words.replace(old, new)
        words = f"hostname {job}-{index}; {words} >> {tmp_path}/log-{index} 2>&1"
        command = ["ip", "netns", "exec", f"{net}-{index}", "unshare", "--uts", "bash", "-c", words]
        mark = f"{net}-{index}"
        process = subprocess.Popen(command, cwd=image, env=os.environ | {"TEST_RUN": mark})
        process.mark = mark
        return process

    yield lambda flags: [start(index, flags) for index in range(JOB["spec"]["completions"])]
    subprocess.run(["bash", "-c", DOWN, net])


@pytest.mark.slow
def test_pods_stopped_and_killed_end_with_the_bytes_of_an_undisturbed_launch(
    start_pods, undisturbed, tiny_mnist, tmp_path
):
    def attempt(step, disturb, more=""):
        pods = start_pods(f"{conftest.ENGINE_FLAGS} {tiny_mnist} {more}")
        try:
            conftest.wait_for_step(tmp_path / "mnist", step, pods[0])
            disturb(pods)
            return [pod.wait(120) for pod in pods]
        finally:
            for pod in pods:
                conftest.kill_all(pod)

    assert attempt(20, lambda pods: pods[0].terminate()) == [EXIT_STOPPED, EXIT_STOPPED]
    assert attempt(60, lambda pods: conftest.kill_all(pods[1])) == [EXIT_FAILURE, -9]
    assert attempt(0, len) == [0, 0]
    assert attempt(0, len, "--batch-size 3") == [EXIT_USAGE, EXIT_USAGE]
    assert digests(tmp_path / "mnist") == digests(undisturbed)
