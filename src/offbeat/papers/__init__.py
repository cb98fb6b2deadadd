"""One recipe per table or figure of the papers: `offbeat paper NAME`."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.papers import dlsgd, fedagrac, fedagrac_convex, fedbuff, heterogeneity, hlsgd, questions, runner
from offbeat.papers.recipe import Made, Recipe, Settings


def command(recipe: Recipe) -> Callable[[Settings], Made]:
    """What `offbeat paper NAME` runs."""

    def made(settings: Settings) -> Made:
        return runner.make(recipe, settings)

    made.__doc__ = recipe.about
    return made


MODULES = (dlsgd, fedagrac, fedagrac_convex, fedbuff, heterogeneity, hlsgd, questions)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for module in MODULES for recipe in sorted(module.RECIPES, key=lambda r: r.name)
}
PAPERS: dict[str, Callable[[Settings], Made]] = {name: command(recipe) for name, recipe in RECIPES.items()}
