"""One engine's prefix index over tokens, and naive twins of it and of the fleet's index."""
