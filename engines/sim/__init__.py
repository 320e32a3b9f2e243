"""An engine that computes nothing: real KV blocks, policies and tiers, and a model of how long computing would take."""
