"""Prompt adapters: named, not served."""
