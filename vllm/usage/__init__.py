"""Usage contexts. Nothing is collected and nothing is sent."""
