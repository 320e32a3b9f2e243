"""The secret that tenants' salts are derived from: made once, kept in the state folder.

It has to outlive the gateway: with another one, no tenant would find its cached blocks again, and no stored API key
would be known. Whoever knows it can name the blocks of every tenant, so the file is for its owner alone.
"""

from pathlib import Path

from gateway.state.secret_file import load_secret

FILE_NAME = "salt.secret"


def load_salt_secret(folder: Path) -> bytes:
    """Return the secret, making it (and the folder) when there is none yet; raises ``StateError``."""
    return load_secret(folder / FILE_NAME, what="salt secret")
