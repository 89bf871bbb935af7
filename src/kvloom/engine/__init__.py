"""Joining the manager's decisions and a model's computing: prompts, timed answers, cold runs to compare with."""

from __future__ import annotations
