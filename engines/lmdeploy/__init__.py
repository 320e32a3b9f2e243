"""LMDeploy as a kvgate engine instance."""

__all__: list[str] = []
