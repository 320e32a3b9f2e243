"""The reference meaning of request graphs: a symbolic machine, its interpreter and a timeline."""
