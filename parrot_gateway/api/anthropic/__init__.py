"""Anthropic's Messages API: requests become chats, answers of any model become messages."""
