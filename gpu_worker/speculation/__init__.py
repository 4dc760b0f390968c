"""Drafts: how they are made and how they are verified."""
