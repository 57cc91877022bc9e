"""Which environment variables an engine process of our own gets.

An engine may run code that came with a checkpoint, and parses files from elsewhere: it gets what it
needs to find Python, devices, caches and the hub, and none of the gateway's or the operator's keys.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Variables that are passed on.
_NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV",
     "LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
)  # fmt: skip

#: Families of variables that are passed on.
_PREFIXES = (
    "LC_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "TRITON_",
    "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "SSL_", "PYTHON",
)  # fmt: skip

#: Proxies, in either case.
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that an engine process gets: an allow-list, without API keys."""
    return {name: text for name, text in environment.items() if _is_passed_on(name)}


def _is_passed_on(name: str) -> bool:
    if name.upper().endswith("_API_KEY"):
        return False
    return name in _NAMES or name.lower() in _PROXIES or name.startswith(_PREFIXES)
