"""``kvgate gateway`` and ``kvgate register``: the gateway's process and its instances."""
