"""Text of others in Markdown."""


def plain(text: str) -> str:
    """Text of others, such as an error, that must not be read as markup."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
