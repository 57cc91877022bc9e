"""Providers as configuration files of LiteLLM name them, and where they speak a passed-through API.

Only facts: the address, the variable that LiteLLM reads the key from, what the name of a model
begins with.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from parrot_gateway.settings.litellm.reasons import NOT_PASSED_ON


class Provider(NamedTuple):
    """A provider that calls can be passed on to."""

    #: Base URL where the file gives none; empty: it has to.
    url: str = ""
    #: Variable of the key where the file gives none; empty: it is called without one.
    key: str = ""
    #: Path behind the `api_base` of a file, unless it ends so.
    suffix: str = ""
    api: Literal["openai", "anthropic"] = "openai"


PROVIDERS: dict[str, Provider] = {
    "openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "text-completion-openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "custom_openai": Provider(),
    "openai_like": Provider(),
    "anthropic": Provider("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", "/v1", "anthropic"),
    # The API of Azure without versions takes models by the names of their deployments.
    "azure": Provider("", "AZURE_API_KEY", "/openai/v1"),
    "ai21": Provider("https://api.ai21.com/studio/v1", "AI21_API_KEY"),
    "cerebras": Provider("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "codestral": Provider("https://codestral.mistral.ai/v1", "CODESTRAL_API_KEY"),
    "cohere": Provider("https://api.cohere.ai/compatibility/v1", "COHERE_API_KEY"),
    "cohere_chat": Provider("https://api.cohere.ai/compatibility/v1", "COHERE_API_KEY"),
    "dashscope": Provider("https://dashscope.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
    "deepinfra": Provider("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "featherless_ai": Provider("https://api.featherless.ai/v1", "FEATHERLESS_AI_API_KEY"),
    "fireworks_ai": Provider("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY"),
    "friendliai": Provider("https://api.friendli.ai/serverless/v1", "FRIENDLI_TOKEN"),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "github": Provider("https://models.inference.ai.azure.com", "GITHUB_API_KEY"),
    "groq": Provider("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "hosted_vllm": Provider(),
    "huggingface": Provider("https://router.huggingface.co/v1", "HF_TOKEN", "/v1"),
    "hyperbolic": Provider("https://api.hyperbolic.xyz/v1", "HYPERBOLIC_API_KEY"),
    "lambda_ai": Provider("https://api.lambda.ai/v1", "LAMBDA_API_KEY"),
    "litellm_proxy": Provider("", "LITELLM_PROXY_API_KEY"),
    "llamafile": Provider("http://127.0.0.1:8080/v1"),
    "lm_studio": Provider(),
    "meta_llama": Provider("https://api.llama.com/compat/v1", "LLAMA_API_KEY"),
    "minimax": Provider("https://api.minimax.io/v1", "MINIMAX_API_KEY"),
    "mistral": Provider("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "moonshot": Provider("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY"),
    "nebius": Provider("https://api.studio.nebius.ai/v1", "NEBIUS_API_KEY"),
    "novita": Provider("https://api.novita.ai/v3/openai", "NOVITA_API_KEY"),
    "nscale": Provider("https://inference.api.nscale.com/v1", "NSCALE_API_KEY"),
    "nvidia_nim": Provider("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
    "ollama": Provider("http://localhost:11434/v1", "", "/v1"),
    "ollama_chat": Provider("http://localhost:11434/v1", "", "/v1"),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "perplexity": Provider("https://api.perplexity.ai", "PERPLEXITYAI_API_KEY"),
    "sambanova": Provider("https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY"),
    "scaleway": Provider("https://api.scaleway.ai/v1", "SCW_SECRET_KEY"),
    "together_ai": Provider("https://api.together.ai/v1", "TOGETHERAI_API_KEY"),
    "vercel_ai_gateway": Provider("https://ai-gateway.vercel.sh/v1", "VERCEL_AI_GATEWAY_API_KEY"),
    "volcengine": Provider("https://ark.cn-beijing.volces.com/api/v3", "VOLCENGINE_API_KEY"),
    "wandb": Provider("https://api.inference.wandb.ai/v1", "WANDB_API_KEY"),
    "xai": Provider("https://api.x.ai/v1", "XAI_API_KEY"),
    "xinference": Provider(),
    "zai": Provider("https://api.z.ai/api/paas/v4", "ZAI_API_KEY"),
}

#: Providers of models that a file names without one.
_BARE = (
    (re.compile(r"(gpt-|chatgpt-|o\d|ft:|text-embedding-|davinci|babbage|dall-e|whisper|tts-)"),
     "openai"),
    (re.compile(r"claude"), "anthropic"),
    (re.compile(r"(command|embed-|rerank-)"), "cohere"),
)  # fmt: skip


def split_model(model: str, custom_provider: str, has_address: bool) -> tuple[str, str]:
    """Provider, and the name of the model there; the provider is empty where none can be told.

    Args:
        model: as `litellm_params.model`.
        custom_provider: as `custom_llm_provider`, or empty.
        has_address: whether an `api_base` is given.
    """
    provider, slash, rest = model.partition("/")
    known = provider in PROVIDERS or provider in NOT_PASSED_ON
    if custom_provider:
        return custom_provider, rest if slash and provider == custom_provider else model
    if slash and known:
        if provider == "openai":
            # The path of the API stands there too: openai/responses/gpt-4o.
            rest = rest.removeprefix("responses/").removeprefix("chat/")
        if provider == "huggingface" and not has_address and rest.count("/") == 2:
            # huggingface/PROVIDER/ORGANISATION/MODEL; its router takes ORGANISATION/MODEL:PROVIDER.
            server, _, name = rest.partition("/")
            rest = f"{name}:{server}"
        return provider, rest
    for pattern, owner in _BARE:
        if pattern.match(model):
            return owner, model
    if has_address and not slash:
        return "openai", model
    return (provider, rest) if slash else ("", model)
