"""Jobs that are killed at random moments and started again, until they end."""
