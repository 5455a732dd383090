"""Process functions, plain and `async def`, and their contexts."""
