"""The integrations' common part of a client: address, key, fields, headers, errors.

Imports the standard library only; `openai` is loaded with the first client that is made. The
integrations differ in their transport: LangChain's and LlamaIndex's models send with the `openai`
package, whose exceptions and HTTP clients are part of their interface, and semantic functions need
httpx alone. So the HTTP library is theirs, and what is sent and understood is here.
"""
