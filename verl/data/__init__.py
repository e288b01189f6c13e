"""Layer 1: data sets, row forms, chat templates to ids, order and packing."""

from verl.data.forms import FORMS, RawPrompt
from verl.data.load import PromptData, load_prompts
from verl.data.packing import plan_micro_batches
from verl.data.rendering import Renderer, render
from verl.data.report import DataReport
from verl.data.sampler import PromptSampler
from verl.data.template_check import check_template

__all__ = [
    "FORMS",
    "DataReport",
    "PromptData",
    "PromptSampler",
    "RawPrompt",
    "Renderer",
    "check_template",
    "load_prompts",
    "plan_micro_batches",
    "render",
]
