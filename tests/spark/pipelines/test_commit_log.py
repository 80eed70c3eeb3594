"""The commit log of a Parquet table, on a local folder, with a crash at every step."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox_spark.parquet.commit_log import LOG_FOLDER, STAGING, CommitLog, CommitLogError, TableFile
from outbox_spark.parquet.folder import FileTaken
from tests.spark.pipelines.local_folder import LocalFolder


class _Killed(Exception):
    """An error that stands for the death of the process."""


class _MortalFolder(LocalFolder):
    """A folder whose user dies before its n-th change."""

    def __init__(self, path, steps):
        super().__init__(path)
        self.steps = steps

    def _step(self):
        self.steps -= 1
        if self.steps < 0:
            raise _Killed

    def create(self, path, text):
        self._step()
        super().create(path, text)

    def move(self, source, destination):
        self._step()
        super().move(source, destination)

    def delete(self, path):
        self._step()
        super().delete(path)


def _stage(root, number, count=2):
    """Write files as Spark would."""
    files = []
    for position in range(count):
        staged = f"{STAGING}/{number}/{position}.parquet"
        (root / staged).parent.mkdir(parents=True, exist_ok=True)
        (root / staged).write_text(f"{number}-{position}")
        files.append(TableFile(f"data/{number}-{position}.parquet", staged, 3))
    return files


def _visible(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("data/*"))


def test_a_new_folder_is_an_empty_table(tmp_path):
    """A new folder is a table without files and positions."""
    log = CommitLog.open(LocalFolder(tmp_path))
    assert (log.number, log.files, log.positions) == (0, {}, {})


def test_remembers_files_and_positions(tmp_path):
    """Committed files and positions are there after opening the log again, also behind many entries."""
    log = CommitLog.open(LocalFolder(tmp_path))
    for number in range(1, 70):
        log.commit("append", _stage(tmp_path, number, 1), {"t": {"0": number}}, rows=1)
    again = CommitLog.open(LocalFolder(tmp_path))
    assert again.positions == {"t": {"0": 69}}
    assert sorted(again.files) == _visible(tmp_path)
    assert len(again.files) == 69
    assert len(list((tmp_path / LOG_FOLDER).iterdir())) < 69


def test_compaction_replaces_files(tmp_path):
    """Replaced files are gone from the log and from the disk, and positions stay."""
    log = CommitLog.open(LocalFolder(tmp_path))
    log.commit("append", _stage(tmp_path, 1), {"t": {"0": 5}})
    old = list(log.files)
    log.commit("compact", _stage(tmp_path, 2, 1), log.positions, removed=old)
    assert list(CommitLog.open(LocalFolder(tmp_path)).files) == _visible(tmp_path) == ["data/2-0.parquet"]


def test_two_writers_cannot_both_commit(tmp_path):
    """The second of two writers is refused, and its files do not count."""
    first, second = (CommitLog.open(LocalFolder(tmp_path)) for _ in range(2))
    first.commit("append", _stage(tmp_path, 1), {"t": {"0": 1}})
    with pytest.raises(FileTaken):
        second.commit("append", _stage(tmp_path, 2), {"t": {"0": 1}})
    assert sorted(CommitLog.open(LocalFolder(tmp_path)).files) == ["data/1-0.parquet", "data/1-1.parquet"]


def test_a_missing_entry_is_an_error(tmp_path):
    """A log with a missing entry is refused."""
    log = CommitLog.open(LocalFolder(tmp_path))
    for number in range(1, 4):
        log.commit("append", _stage(tmp_path, number), {"t": {"0": number}})
    (tmp_path / LOG_FOLDER / f"{2:020d}.json").unlink()
    with pytest.raises(CommitLogError, match="is missing"):
        CommitLog.open(LocalFolder(tmp_path))


@pytest.mark.parametrize("path", ["../other/x.parquet", "/etc/passwd", "hdfs://other/x.parquet", ""])
@pytest.mark.parametrize("field", ["path", "staged", "removed"])
def test_a_ledger_names_files_of_its_own_folder_alone(tmp_path, field, path):
    """A log with a path out of its folder is refused, as the files that it names are read, moved and deleted."""
    log = CommitLog.open(LocalFolder(tmp_path))
    log.commit("append", _stage(tmp_path, 1), {"t": {"0": 1}})
    (file,) = (tmp_path / LOG_FOLDER).glob("*.json")
    entry = json.loads(file.read_text())
    if field == "removed":
        entry["removed"] = [path]
    else:
        entry["added"][0][field] = path
    file.write_text(json.dumps(entry))
    with pytest.raises(CommitLogError, match="is not below"):
        CommitLog.open(LocalFolder(tmp_path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(0, 12), min_size=1, max_size=8))
def test_any_crash_leaves_all_of_a_batch_or_nothing(tmp_path_factory, steps):
    """After a crash at any step the next writer finds whole batches, whose positions fit their files."""
    root = tmp_path_factory.mktemp("table")
    for attempt, mortal in enumerate([*steps, 10_000]):
        try:
            folder = _MortalFolder(root, mortal)
            log = CommitLog.open(folder)
            log.finish()
            for _ in range(3):
                batch = log.positions.get("t", {}).get("0", 0) + 1
                log.commit("append", _stage(root, f"{batch}-{attempt}"), {"t": {"0": batch}})
        except _Killed:
            continue
    log = CommitLog.open(LocalFolder(root))
    reached = log.positions["t"]["0"]
    batches = [path.split("/")[1].split("-")[0] for path in log.files]
    assert sorted(batches, key=int) == [str(batch) for batch in range(1, reached + 1) for _ in range(2)]
    assert sorted(log.files) == _visible(root)
    assert not (root / STAGING).exists()
