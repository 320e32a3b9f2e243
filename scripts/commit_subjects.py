"""Check the subjects of new commits: ``area: imperative subject``, at most 72 characters.

New commits are those after `START`, the commit from which the rule holds. A clone that does not have `START` (a shallow
clone, an archive without history) is not checked, and the script says why. Merge commits are not checked.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = "a10a5b7f4175be94e61028ade3dd3323eddf1240"
LONGEST = 72
_FORM = re.compile(r"(?P<area>[a-z0-9_./, -]+): (?P<verb>[a-z][\w'-]*)( \S.*)?")
_INFLECTED = re.compile(r"\w+(?:ed|ing)")
_IMPERATIVE = {"bring", "embed", "exceed", "feed", "need", "proceed", "ring", "seed", "shed", "speed", "succeed"}


def main() -> int:
    """Check the commits between `START` and HEAD; return the process's exit code."""
    subjects = new_subjects(ROOT, START)
    if isinstance(subjects, str):
        print(f"Commit subjects are not checked: {subjects}", file=sys.stderr)
        return 0
    faults = [f"{commit[:10]} {fault}: {subject}" for commit, subject in subjects if (fault := fault_of(subject))]
    for each in faults:
        print(each, file=sys.stderr)
    if faults:
        print(
            f"Write subjects as 'area: imperative', at most {LONGEST} characters (git commit --amend)", file=sys.stderr
        )
    return 1 if faults else 0


def fault_of(subject: str) -> str:
    """Return what is wrong with a subject, or the empty string."""
    if len(subject) > LONGEST:
        return f"{len(subject)} characters instead of at most {LONGEST}"
    form = _FORM.fullmatch(subject)
    if form is None:
        return "not of the form 'area: imperative'"
    verb = form["verb"]
    if _INFLECTED.fullmatch(verb) and verb not in _IMPERATIVE:
        return f"'{verb}' is not an imperative"
    return "ends in a full stop" if subject.endswith(".") else ""


def new_subjects(repository: Path, start: str) -> list[tuple[str, str]] | str:
    """Return the commits after `start` and their subjects, oldest first, or why they cannot be listed."""
    if not (repository / ".git").exists():
        return "this folder is no git repository"
    if _git(repository, "cat-file", "-e", f"{start}^{{commit}}").returncode != 0:
        return f"commit {start[:10]} is not in this clone (git fetch --unshallow)"
    if _git(repository, "merge-base", "--is-ancestor", start, "HEAD").returncode != 0:
        return f"commit {start[:10]} is not an ancestor of HEAD"
    log = _git(repository, "log", "--reverse", "--no-merges", "--format=%H %s", f"{start}..HEAD")
    log.check_returncode()
    commits = (line.partition(" ") for line in log.stdout.splitlines())
    return [(commit, subject) for commit, _, subject in commits]


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
