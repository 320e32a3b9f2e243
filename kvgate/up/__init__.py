"""``kvgate up``: a whole stack on one machine."""
