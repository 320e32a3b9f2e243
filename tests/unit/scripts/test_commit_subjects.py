import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import commit_subjects as module

    return module


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for subject in ("Whatever came before", "docs: add a page", "Added a page."):
        git(folder, "commit", "-q", "--allow-empty", "-m", subject)
    return folder


@pytest.mark.parametrize(
    "subject",
    [
        "gateway: keep bodies of pipelined requests apart",
        "engines/lmdeploy: load chunks",
        "docs, tests: name hops",
        "tests: embed a font",
        "docs: shorten",
        "a: " + "b" * 69,
    ],
)
def test_a_subject_with_an_area_and_an_imperative_passes(subjects: ModuleType, subject: str) -> None:
    assert subjects.fault_of(subject) == ""


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Add a page", "not of the form"),
        ("gateway: Add a page", "not of the form"),
        ("gateway:add a page", "not of the form"),
        ("Gateway: add a page", "not of the form"),
        ("gateway: ", "not of the form"),
        ("gateway: added a page", "'added' is not an imperative"),
        ("gateway: adding a page", "'adding' is not an imperative"),
        ("gateway: add a page.", "ends in a full stop"),
        ("a: " + "b" * 70, "73 characters"),
    ],
)
def test_another_subject_is_refused_with_its_fault(subjects: ModuleType, subject: str, fault: str) -> None:
    assert fault in subjects.fault_of(subject)


def test_only_commits_after_the_start_are_checked(subjects: ModuleType, repository: Path) -> None:
    start = git(repository, "rev-parse", "HEAD~2")
    assert [subject for _, subject in subjects.new_subjects(repository, start)] == ["docs: add a page", "Added a page."]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_clone_without_the_start_is_not_checked_and_the_reason_names_the_remedy(
    subjects: ModuleType, repository: Path, tmp_path: Path, depth: int
) -> None:
    start = git(repository, "rev-parse", "HEAD~2")
    git(tmp_path, "clone", "-q", "--depth", str(depth), repository.as_uri(), "shallow")
    assert "git fetch --unshallow" in subjects.new_subjects(tmp_path / "shallow", start)


def test_a_history_that_does_not_contain_the_start_is_not_checked(subjects: ModuleType, repository: Path) -> None:
    start = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "--orphan", "other")
    git(repository, "commit", "-q", "--allow-empty", "-m", "other: begin")
    assert "not an ancestor" in subjects.new_subjects(repository, start)


def test_an_unpacked_archive_is_not_checked(subjects: ModuleType, tmp_path: Path) -> None:
    assert "no git repository" in subjects.new_subjects(tmp_path, subjects.START)


def test_a_faulty_commit_fails_the_check_and_is_named(
    subjects: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subjects, "ROOT", repository)
    monkeypatch.setattr(subjects, "START", git(repository, "rev-parse", "HEAD~2"))
    assert subjects.main() == 1
    assert "Added a page." in capsys.readouterr().err
    monkeypatch.setattr(subjects, "START", git(repository, "rev-parse", "HEAD"))
    assert subjects.main() == 0
