"""`fedsieve cache`: what is kept between runs."""

import typer

NAMED = 5  # of what is left in the folder

cache_app = typer.Typer(help="The cache of downloads and features.")


@cache_app.command("show")
def cache_show() -> None:
    """Say where the cache is and how much is in it."""
    from fedsieve.federate.traffic import size
    from fedsieve.files.cache import cache_folder, cache_size

    print(f"{cache_folder()}: {size(cache_size())}")


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete what fedsieve has put into the cache; other files in its folder stay."""
    from fedsieve.federate.traffic import size
    from fedsieve.files.cache import cache_folder, clear

    freed, left = clear()
    print(f"{cache_folder()}: {size(freed)} freed")
    if left:
        named = ", ".join(left[:NAMED]) + (f" and {len(left) - NAMED:,} more" if len(left) > NAMED else "")
        print(f"kept, because fedsieve did not create them or is using them: {named}")
