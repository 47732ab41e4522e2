"""Passes, their state and their epilogues."""

from __future__ import annotations

from inferlet.eta._channel import Channel
from inferlet.eta._output import Output
from inferlet.eta._pass import ForwardPass
from inferlet.eta._pipeline import Pipeline
from inferlet.eta._state import StateGeometry, WorkingSet

__all__ = ["Channel", "ForwardPass", "Output", "Pipeline", "StateGeometry", "WorkingSet"]
