"""``kvgate top``: a running gateway at a glance."""
