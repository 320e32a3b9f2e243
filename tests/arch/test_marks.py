"""What kvgate notes on LMDeploy's objects: a name has one owner, or one module reads another's note as its own."""

import re
from collections import Counter
from pathlib import Path

import engines

_NOTE = re.compile(r'= "(kvgate_[a-z_]+)"$', re.MULTILINE)


def test_each_attribute_that_is_put_on_lmdeploys_objects_is_named_in_one_module() -> None:
    names = Counter(
        name
        for file in Path(engines.__file__).parent.rglob("*.py")
        for name in _NOTE.findall(file.read_text(encoding="utf-8"))
    )
    assert len(names) > 10
    assert [name for name, count in names.items() if count > 1] == []
