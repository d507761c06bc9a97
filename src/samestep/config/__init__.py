"""Frozen, validated settings; every error names the key, its place and the nearest known key."""

from samestep.config.batching import Batching as Batching
from samestep.config.layers import load_recipe as load_recipe
from samestep.config.plain_yaml import write_yaml as write_yaml
from samestep.config.recipe import AdamSettings as AdamSettings
from samestep.config.recipe import OptimizerSettings as OptimizerSettings
from samestep.config.recipe import Recipe as Recipe
from samestep.config.recipe import ScheduleSettings as ScheduleSettings
from samestep.config.recipe import SgdSettings as SgdSettings
from samestep.config.settings import Settings as Settings
from samestep.config.settings import explain as explain
from samestep.config.settings import nearest as nearest

__all__ = [
    "AdamSettings",
    "Batching",
    "OptimizerSettings",
    "Recipe",
    "ScheduleSettings",
    "Settings",
    "SgdSettings",
    "explain",
    "load_recipe",
    "nearest",
    "write_yaml",
]
