"""A long run of the fuzz tests: malformed bytes to everything that reads bytes of others."""
