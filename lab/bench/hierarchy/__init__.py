"""Traces served through the real tiers, without bytes."""
