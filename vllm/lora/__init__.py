"""Adapters: named, not served."""
