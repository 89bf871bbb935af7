"""Joining the manager's decisions and a model's computing: prompts, files, memory, timed answers, cold runs."""

from __future__ import annotations
