"""``kvgate admin``: the calls to a running gateway's admin API."""
