"""Carries out plans: the legs before an answer, KV hand-over, and the plans that run now."""
