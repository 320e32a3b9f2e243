"""Fleets in virtual time: simulated engines behind the gateway's own routing and admission, under one clock."""
