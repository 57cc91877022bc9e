"""The common part of all clients in the integrations: address, key, fields, headers, errors.

Imports only the standard library; the first client loads `openai`. The integrations differ in
transport. LangChain's and LlamaIndex's models send with the `openai` package, whose exceptions and
HTTP clients are part of their interface; semantic functions need only httpx. So each integration
has its HTTP library, and this package has the content of requests and answers.
"""
