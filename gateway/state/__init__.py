"""What survives a restart of the gateway."""

from gateway.state.salt import load_salt_secret

__all__ = ["load_salt_secret"]
