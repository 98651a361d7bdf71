"""--mirror: what a lost machine leaves behind is enough, and no failure of a store is silent."""

import itertools
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import faults
import fsspec
import pytest
import torch
from conftest import refused, wait_until
from fsspec.implementations.memory import MemoryFileSystem
from saving import Run, step

from trainkit.errors import RunFailure
from trainkit.numbers.orders import Progress
from trainkit.store import places as stores

URL = "faulty://store/run"


class Faulty(MemoryFileSystem):
    """A store in memory; plan(call, name) returns how this call breaks: "" does not."""

    protocol = "faulty"
    store, pseudo_dirs = {}, [""]
    plan = staticmethod(lambda call, name: "")

    def _break(self, call: str, path: str) -> str:
        how = Faulty.plan(call, path.partition("/run/")[2])
        if how == "drop":
            raise ConnectionResetError(f"faulty://me:secret@host{path}")
        return how

    def put_file(self, lpath, rpath, **kwargs):
        how = self._break("put", rpath)
        if how == "forget":
            return
        super().put_file(lpath, rpath, **kwargs)
        if how == "half":
            content = self.cat_file(rpath)
            self.pipe_file(rpath, content[: len(content) // 2])

    def get_file(self, rpath, lpath, **kwargs):
        how = self._break("get", rpath)
        super().get_file(rpath, lpath, **kwargs)
        if how == "flip":
            content = Path(lpath).read_bytes()
            Path(lpath).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def find(self, path, **kwargs):
        self._break("find", path)
        return super().find(path, **kwargs)

    def rm(self, path, recursive=False, **kwargs):
        self._break("rm", path)
        super().rm(path, recursive, **kwargs)


@pytest.fixture
def faulty(monkeypatch):
    """The store of URL, empty; a test sets Faulty.plan."""
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(stores, "WAITS", (0, 0, 0.1))
    monkeypatch.setattr(Faulty, "plan", staticmethod(lambda call, name: ""))
    Faulty.store.clear()
    Faulty.pseudo_dirs[:] = [""]
    return Faulty


def train(tmp_path: Path, num_steps: int, resume: str | None = None, **options) -> Run:
    """A run of so many steps, whose copies are done, or have failed."""
    run = Run(tmp_path / "run", 2, mirror=options.pop("url", URL))
    run.progress = run.checkpoints.resume(resume)
    run.train(num_steps)
    run.checkpoints.mirror.wait()
    return run


def names(run: Run) -> list[str]:
    """The complete checkpoints of the mirror."""
    run.checkpoints.mirror.look()
    return sorted(run.checkpoints.mirror.whole())


def test_a_run_whose_disk_is_lost_goes_on_from_the_newest_checkpoint_and_keeps_as_many(
    faulty, tmp_path
):
    run = train(tmp_path, 3)
    assert names(run) == [step(tmp_path, n).name for n in (2, 3)]
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    run = train(tmp_path, 2, "auto")
    weights, log = run.weights(), run.tracker.path.read_bytes()
    for kept in (None, "older"):  # an empty folder, and one that has less
        shutil.rmtree(tmp_path / "run")
        if kept:
            (tmp_path / kept).rename(tmp_path / "run")
        run = Run(tmp_path / "run", 2, mirror=URL)
        assert run.checkpoints.resume("auto") == Progress(step=5, step_in_epoch=5)
        assert all(map(torch.equal, run.weights(), weights))
        assert run.tracker.path.read_bytes() == log
    run.checkpoints.resume(str(step(tmp_path / "run", 3)))
    assert "step-0000000005" not in names(run)  # the run no longer leads to it
    run.checkpoints.mirror.wait()
    assert names(run) == [step(tmp_path, 3).name]


@pytest.mark.parametrize("how", ["drop", "half", "forget"])
def test_each_checkpoint_that_cannot_be_copied_is_said_once_and_the_end_says_what_is_missing(
    faulty, tmp_path, capfd, how, monkeypatch
):
    monkeypatch.setattr(stores, "WAITS", (0,))
    faulty.plan = staticmethod(lambda call, name: how if call == "put" and "model" in name else "")
    run = train(tmp_path, 2)
    output = capfd.readouterr().out
    said = re.findall(r"^(step-\d+) was not mirrored: (.*)$", output, re.M)
    assert [name for name, _ in said] == [step(tmp_path, n).name for n in (1, 2)]
    reason = {"drop": "ConnectionResetError"}
    assert all(reason.get(how, "does not have all of what it took") in text for _, text in said)
    assert "secret" not in output and names(run) == []
    run.checkpoints.mirror.finish()
    (last,) = capfd.readouterr().out.splitlines()
    assert last.startswith(f"--mirror {URL} lacks some of this run")
    assert "DONE" not in run.checkpoints.mirror.listed
    run.checkpoints.mirror.config.mirror_must = True
    with pytest.raises(RunFailure, match="lacks some of this run"):
        run.checkpoints.mirror.finish()
    faulty.plan = staticmethod(lambda call, name: "")
    run = train(tmp_path, 1, "auto")
    run.checkpoints.mirror.finish()
    assert "lacks" not in capfd.readouterr().out and len(names(run)) == 2


@pytest.mark.parametrize("damage", ["flip", "no manifest", "forged"])
def test_a_checkpoint_that_is_not_whole_in_the_mirror_is_passed_over(
    faulty, tmp_path, capfd, damage
):
    copied = train(tmp_path, 2).checkpoints.mirror
    files, newest = copied.files, f"{copied.root}/checkpoints/{step(tmp_path, 2).name}"
    if damage == "flip":
        faulty.plan = staticmethod(
            lambda call, name: damage if call == "get" and "2/state/model" in name else ""
        )
    elif damage == "no manifest":
        files.rm(f"{newest}/MANIFEST.json")
    else:
        content = files.cat_file(f"{newest}/MANIFEST.json").replace(
            b"trainer.json", b"../../x.json"
        )
        files.pipe_file(f"{newest}/MANIFEST.json", content)
    shutil.rmtree(tmp_path / "run")
    run = Run(tmp_path / "run", 2, mirror=URL)
    assert run.checkpoints.resume("auto").step == 1
    assert (f"skipped {step(tmp_path / 'run', 2)}" in capfd.readouterr().out) == (
        damage != "no manifest"
    )
    assert names(run) == [step(tmp_path, 1).name]  # the other one is not what this run leads to
    files.rm(copied.root, recursive=True)
    shutil.rmtree(tmp_path / "run")
    assert Run(tmp_path / "run", 2, mirror=URL).checkpoints.resume("auto").step == 0


def test_a_mirror_that_does_not_answer_ends_a_resume_and_no_run_begins_anew(faulty, tmp_path):
    train(tmp_path, 1)
    shutil.rmtree(tmp_path / "run")
    for broken in ("find", "get"):
        faulty.plan = staticmethod(lambda call, _, broken=broken: "drop" if call == broken else "")
        with pytest.raises(RunFailure, match=r"^faulty://store/run/.*: Connection") as ended:
            Run(tmp_path / "run", 2, mirror=URL).checkpoints.resume("auto")
        assert "secret" not in str(ended.value)


def test_the_mirror_of_another_run_is_refused_and_nothing_of_it_gets_into_the_folder(
    faulty, tmp_path
):
    train(tmp_path, 1)
    with refused("holds a run: continue it with --resume auto"):
        Run(tmp_path / "new", 2, mirror=URL, resume=None)
    run = Run(tmp_path / "new", 2, mirror=URL)
    run.checkpoints.fingerprint = {"seed": 1}
    for _ in range(2):
        with refused("belongs to another run: seed is None there"):
            run.checkpoints.resume("auto")
        assert not [*(tmp_path / "new" / "checkpoints").glob("step-*")]
    there = {*faulty.store}  # which a run with newer checkpoints does not touch
    for url in (f"{URL}2", URL):
        run = Run(tmp_path / "other", 2, mirror=url)
        run.checkpoints.fingerprint = {"seed": 1}
        if url == URL:
            with refused(r"step-0000000001: .* belongs to another run"):
                run.checkpoints.resume("auto")
        else:
            run.checkpoints.resume(None)
            run.train(3)
        run.checkpoints.commits.close()
    assert there <= faulty.store.keys()


def test_the_training_waits_only_for_a_mirror_that_is_more_than_keep_checkpoints_behind(
    faulty, tmp_path, capfd, monkeypatch
):
    """And its newest checkpoint is durable by then, beside those that are not copied."""
    go_on, started = threading.Event(), []
    faulty.plan = staticmethod(lambda call, name: go_on.wait(60) and "" if call == "put" else "")
    run = Run(tmp_path / "run", 2, mirror=URL)
    run.checkpoints.resume(None)

    def training():
        for _ in range(5):
            started.append(run.progress.step)
            run.train(1)

    trainer = threading.Thread(target=training)
    trainer.start()
    wait_until(lambda: len(started) > 3)
    time.sleep(1)
    assert started == [0, 1, 2, 3]
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(folder.iterdir()) == [step(tmp_path / "run", n) for n in (1, 2, 3)]
    go_on.set()
    trainer.join()
    run.checkpoints.mirror.wait()
    output = capfd.readouterr().out
    assert output.count("waiting for --mirror") == 1
    assert "mirrored" not in output
    assert names(run) == [step(tmp_path, n).name for n in (4, 5)]


def test_a_run_that_ends_waits_for_the_mirror_but_not_for_ever(faulty, tmp_path, capfd):
    faulty.plan = staticmethod(lambda call, name: time.sleep(0.5) or "" if call == "put" else "")
    for wait in ("stopped", "failed", "late"):
        url = URL + wait
        run = Run(tmp_path / wait, 2, mirror=url, timeout=0.1 if wait == "late" else 60)
        run.checkpoints.resume(None)
        run.train(1)
        if wait == "stopped":
            run.checkpoints.commits.wait()
            run.checkpoints.wait_for_mirror(60)
            assert len(names(run)) == 1
        try:
            raise RunFailure("the loss is NaN")
        except RunFailure:
            run.checkpoints.commits.close()
        assert len(names(run)) == (wait != "late")
        said = capfd.readouterr().out
        assert ("the loss is NaN: now waiting until --mirror" in said) == (wait != "stopped")
        assert ("does not have the newest checkpoint" in said) == (wait == "late")


def test_no_password_of_a_url_is_printed_or_kept(tmp_path):
    for url in (
        "s3://me:se cret/secret@bucket",
        "simplecache::sftp://me:s@e@secret@host/run",
        "https://host/run?signature=secret",
    ):
        with refused(r"--mirror .*saved with the run.*AWS_SECRET_ACCESS_KEY") as raised:
            Run(tmp_path, 2, mirror=url)
        assert not re.search("sec|me:|s@e|cret", str(raised.value).partition(": ")[0])


class Lost:
    """Runs whose machine is lost, with their run folder, and which go on in an empty one."""

    def __init__(self, nursery, script, args, where, world=1, url=None, **plan):
        self.nursery, self.script, self.world = nursery, script, world
        self.run_dir, self.url = where / "run", str(url or where / "mirror")
        self.args, self.plan = [*args, "--mirror", self.url, "--run-dir", self.run_dir], plan
        whole = [*args, "--run-dir", where / "whole"]
        outcome = nursery.run(script, *whole, world=world, **plan)
        assert outcome.codes == [0] * world, outcome.output
        self.expected = faults.digests(where / "whole")

    def run(self, *more, **plan) -> faults.Outcome:
        args = [*self.args, "--resume", "auto", *more]
        outcome = self.nursery.run(
            self.script, *args, world=self.world, **{"timeout": 120, **self.plan, **plan}
        )
        assert None not in outcome.codes, outcome.output
        return outcome

    def lose(self):
        """Remove the run folder, if the run was not killed before it made one."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def finish(self) -> str:
        """Go on in an empty folder to the end; folder and mirror are then as they should be."""
        outcome = self.run()
        assert outcome.codes == [0] * self.world, outcome.output
        files = fsspec.url_to_fs(self.url, skip_instance_cache=True)[0]
        copy = Path(f"{self.run_dir}.copy")
        shutil.rmtree(copy, ignore_errors=True)
        files.get(f"{self.url}/", f"{copy}/", recursive=True)
        for folder in (self.run_dir, copy):
            assert faults.digests(folder) == self.expected
            assert (folder / "DONE").exists() and not faults.incomplete(folder)
            assert [*(folder / "checkpoints").glob("step-*")]
        return outcome.output

    def kill_in_call(self, call: int) -> bool:
        """One run killed halfway through this call of the store, and the one that goes on.

        The main process alone copies, so it is the one that is killed.
        """
        self.lose()
        shutil.rmtree(self.url, ignore_errors=True)
        # If the other process waited for this one as long as --timeout says, it would not end.
        outcome = self.run("--timeout", 900, fault={"call": call}, timeout=300)
        if outcome.codes == [0] * self.world:
            return False
        assert outcome.codes[0] == -signal.SIGKILL, outcome.output
        self.lose()
        self.finish()
        return True


@pytest.fixture
def quick_args(arguments):
    """Ten steps, five checkpoints; of each there are nine calls of the store."""
    return [*arguments["train_regression"], "--keep-best", "eval_loss"]


def test_a_machine_lost_in_the_middle_of_a_copy_costs_no_byte(nursery, quick_args, tmp_path):
    lost = Lost(nursery, "train_regression", quick_args, tmp_path, world=2)
    assert lost.kill_in_call(8)


def test_a_mirror_that_fails_ends_the_run_with_0_and_its_sentence_last_or_with_1(
    nursery, quick_args, tmp_path
):
    (tmp_path / "url").mkdir()
    (tmp_path / "url" / "checkpoints").write_text("no folder")
    args = [*quick_args, "--save-every", 5, "--epochs", 1]
    lost = Lost(nursery, "train_regression", args, tmp_path, url=tmp_path / "url")
    ended = lost.run()
    assert ended.codes == [0], ended.output
    assert ended.stdout.splitlines()[-1].startswith(f"--mirror {lost.url} lacks some of this run")
    assert ended.stdout.count(" was not mirrored: ") == 1
    must = lost.run("--mirror-must")
    assert must.codes == [1] and not (lost.run_dir / "DONE").exists(), must.output
    assert must.stderr.startswith(f"error: --mirror {lost.url} lacks some of this run")


def test_a_bucket_is_a_mirror_also_if_connections_are_dropped(s3, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(stores, "WAITS", (0, 0, 0.1))
    url = "s3://bucket/run"
    run = train(tmp_path, 2, url=url)
    s3.answer = lambda number, request: number % 5 or request["werkzeug.socket"].shutdown(2)
    run = train(tmp_path, 2, "auto", url=url)
    shutil.rmtree(tmp_path / "run")
    weights, again = run.weights(), Run(tmp_path / "run", 2, mirror=url)
    assert again.checkpoints.resume("auto").step == 4
    assert all(map(torch.equal, again.weights(), weights))
    assert names(again) == [step(tmp_path, n).name for n in (3, 4)]
    output = capfd.readouterr()
    assert "mirrored" not in output.out and "secret" not in output.out + output.err


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_sigkill_in_each_call_that_writes_to_a_folder(nursery, quick_args, tmp_path, world):
    args = [*quick_args, "--save-every", 3]
    lost = Lost(nursery, "train_regression", args, tmp_path, world)
    num = next(call for call in itertools.count() if not lost.kill_in_call(call))
    print(f"SIGKILL in each of {num} calls, {world} processes: equal bytes")
    assert num > 3
