"""Profiles of simulated engines: measured on a real engine, fitted to the time model."""
