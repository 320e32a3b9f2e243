"""Prefill/decode separation: prompts computed by one LMDeploy instance and answered by another."""

__all__: list[str] = []
