"""The admin key where no setting gives one: made once, kept in the state folder, where ``kvgate admin`` finds it."""

from pathlib import Path

from gateway.state.secret_file import load_secret

FILE_NAME = "admin.key"


def load_admin_key(folder: Path) -> str:
    """Return the key, making it (and the folder) when there is none yet; raises ``StateError``."""
    return load_secret(folder / FILE_NAME, what="admin key").hex()
