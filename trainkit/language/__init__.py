"""Conversations and pairs of answers, for language models."""
