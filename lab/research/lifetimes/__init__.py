"""Estimators of how long blocks and answers last, learnt online."""
