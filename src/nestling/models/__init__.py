"""Language models: one configuration and one causal language model, as Hugging Face classes.

Importing this package registers them with the Auto classes; `import nestling` does so when they are
first asked for.
"""

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"nestling.models needs {error.name}: pip install 'nestling[lm]'", name=error.name
    ) from error

from nestling.files import fingerprint
from nestling.models import presets
from nestling.models.cache import MemoryCache
from nestling.models.card import model_card
from nestling.models.configuration import NestlingConfig
from nestling.models.modeling import NestlingForCausalLM, NestlingModel
from nestling.models.saving import load_state, save_state
from nestling.models.shipped import pretrained
from nestling.models.streaming import StreamOutput, stream
from nestling.models.tokenizer import byte_tokenizer

__all__ = [
    "MemoryCache",
    "NestlingConfig",
    "NestlingForCausalLM",
    "NestlingModel",
    "StreamOutput",
    "byte_tokenizer",
    "fingerprint",
    "load_state",
    "model_card",
    "presets",
    "pretrained",
    "save_state",
    "stream",
]

AutoConfig.register("nestling", NestlingConfig, exist_ok=True)
AutoModel.register(NestlingConfig, NestlingModel, exist_ok=True)
AutoModelForCausalLM.register(NestlingConfig, NestlingForCausalLM, exist_ok=True)
