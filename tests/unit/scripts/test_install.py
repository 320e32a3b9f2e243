import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import install as module

    return module


def script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_old_python_is_named_with_what_to_do(tmp_path: Path) -> None:
    old = script(tmp_path, "old", 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    done = subprocess.run(
        ["/bin/sh", SCRIPTS / "setup"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert "make setup PYTHON=" in done.stderr


def test_nothing_is_done_when_nothing_changed(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", "requirements/cpu.txt", "scripts/install.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("PATH", "/nowhere")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "kvgate").touch()
    wanted = install.fingerprint(tmp_path, gpu=False)
    (tmp_path / ".venv" / "kvgate-setup.json").write_text(install.json.dumps(wanted))
    install.install(tmp_path, 0.0)
    assert capsys.readouterr().out == ""


def test_a_changed_input_is_another_fingerprint(install: ModuleType, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "requirements/cpu.txt", "scripts/install.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = install.fingerprint(tmp_path, gpu=False)
    (tmp_path / "requirements" / "cpu.txt").write_text("other")
    assert install.fingerprint(tmp_path, gpu=False) != first
    assert install.fingerprint(tmp_path, gpu=True) != install.fingerprint(tmp_path, gpu=False)


def test_a_torn_stamp_is_not_current(install: ModuleType, tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    stamp.write_text('{"inputs": ')
    assert not install.is_current(stamp, {"inputs": "a"})


def test_too_little_disk_is_told_before_anything_is_downloaded(install: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(install.InstallError, match=r"GB free, setup needs \d+ GB"):
        install.need_disk(tmp_path, 10**18)


def test_pip_settings_reach_uv(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE", "ALL_PROXY", "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    told = install.uv_settings(
        {
            "index-url": "https://mirror/simple",
            "extra-index-url": "file:///a\nfile:///b",
            "find-links": "/w",
            "cert": "/c",
        }
    )
    assert told["UV_DEFAULT_INDEX"] == "https://mirror/simple"
    assert told["UV_INDEX"] == "file:///a file:///b"
    assert told["UV_FIND_LINKS"] == "/w"
    assert told["SSL_CERT_FILE"] == "/c"


def test_the_users_own_uv_settings_win(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mine/simple")
    assert "UV_DEFAULT_INDEX" not in install.uv_settings({"index-url": "https://mirror/simple"})


def test_pips_own_settings_are_read(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/wheels")
    assert install.pip_settings(Path(sys.executable))["find-links"] == "/some/wheels"


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("error: Failed to fetch: dns error: Name or service not known", "package index can't be reached"),
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("error: something else", "Run it again after mending that"),
    ],
)
def test_a_failed_step_says_what_to_do(
    install: ModuleType, tmp_path: Path, output: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failing = script(tmp_path / "bin", "fails", f"echo '{output.replace(chr(39), '')}'; exit 3")
    with pytest.raises(install.InstallError) as failure:
        install.run([failing])
    assert advice in str(failure.value)
    assert "error" in str(failure.value).lower()
    assert str(failing) in str(failure.value)


def test_no_source_of_a_cpu_build_is_one_clear_message(install: ModuleType, tmp_path: Path) -> None:
    failing = script(tmp_path, "uv", "echo dns error; exit 2")
    hint = install._torch_hint("torch==2.13.0")
    with pytest.raises(install.InstallError, match="PIP_FIND_LINKS=/that/folder make setup"):
        install.run([failing], hint=hint)


@pytest.mark.parametrize(
    ("body", "found"),
    [("echo 'GPU 0: NVIDIA H100'", True), ("echo No devices were found; exit 6", False), ("exit 9", False)],
)
def test_a_gpu_counts_when_its_driver_lists_it(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, body: str, found: bool
) -> None:
    script(tmp_path, "nvidia-smi", body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert install.has_nvidia_gpu() is found


def test_the_cpu_build_that_a_folder_of_wheels_offers_is_recognised(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not install.needs_cpu_index():
        pytest.skip("here every torch is a CPU build")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _wheel(wheels, "torch", "2.13.0+cpu")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert install.delivers_cpu_build(Path(sys.executable), "torch==2.13.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert not install.delivers_cpu_build(Path(sys.executable), "torch==2.13.0")


def _wheel(folder: Path, name: str, version: str) -> None:
    import zipfile

    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
