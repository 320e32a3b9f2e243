"""What holds for every test."""

from hypothesis import settings

# A busy machine makes any example slow once in a while: what is tested is what comes out, never how soon.
settings.register_profile("kvgate", deadline=None)
settings.load_profile("kvgate")
