"""Constructs every component from the settings; the only package that imports all others."""
