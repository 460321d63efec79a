"""`fedsieve cache`: what is kept between runs."""

import typer

cache_app = typer.Typer(help="The cache of downloads and features.")


@cache_app.command("show")
def cache_show() -> None:
    """Say where the cache is and how much is in it."""
    from fedsieve.cache import cache_folder, cache_size
    from fedsieve.federate.traffic import size

    print(f"{cache_folder()}: {size(cache_size())}")


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete everything in the cache."""
    from fedsieve.cache import cache_folder, clear
    from fedsieve.federate.traffic import size

    print(f"{cache_folder()}: {size(clear())} freed")
