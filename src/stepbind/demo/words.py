"""The words that the demonstration's stories are made of. One pool, one use: a name is never a town."""

from __future__ import annotations

NAMES = (
    "Ada Anna Aron Bella Boris Carl Clara David Dora Edith Ella Emil Emma Erik Felix Flora Georg Greta Hanna Hugo Ida "
    "Iris Ivan Jana Jonas Julia Karin Karl Lena Leo Lucy Lukas Mara Marco Max Mina Nils Nora Olga Oskar Otto Pavel "
    "Peter Petra Rolf Rosa Sara Simon Sven Tilda Tom Ulf Vera Viktor Walter Wanda"
).split()
TOWNS = (
    "Athens Basel Bergen Berlin Boston Bremen Cairo Calais Cork Delft Dover Dublin Essen Genoa Ghent Kiev Krakow "
    "Lille Lima London Lyon Madrid Malmo Milan Munich Nancy Naples Odessa Oslo Oxford Padua Paris Parma Porto "
    "Prague Quito Riga Rome Siena Sofia Split Tallinn Tokyo Trier Turin Utrecht Verona Vienna Warsaw York Zagreb "
    "Zurich"
).split()
TRADES = (
    "baker barber butcher carpenter cook dentist doctor driver farmer fisher gardener hunter lawyer mason miller "
    "nurse painter pilot potter printer sailor singer smith tailor teacher weaver"
).split()
THINGS = (
    "apron basket bell book bottle bowl box brush bucket candle carpet chair clock coat compass cup drawer drum "
    "flag flute fork glove hammer hat jacket kettle key knife ladder lamp map mirror needle pillow plate ring rope "
    "saddle scarf ship spear spoon sword tent towel trumpet umbrella vase violin wallet wheel whistle"
).split()
PLACES = (
    "bakery barn bridge castle cellar church corner courtyard factory ferry field forest fountain garden gate hall "
    "harbour hill inn island kitchen lake library market meadow mill orchard park river road school square stable "
    "station theatre tower valley wall well yard"
).split()
TIMES = (
    "at dawn|at noon|at night|in spring|in summer|in autumn|in winter|on Monday|on Tuesday|on Friday|on Sunday|"
    "before breakfast|after dinner|long ago|one evening|that morning|every week|again and again|for an hour"
).split("|")
WEATHER = "cold rain|deep snow|grey fog|heavy hail|soft wind|strong wind|thick mist|warm sun|wild storm".split("|")
FALLS = "lay over|came over|passed|covered|went around|stayed near|fell on|hid".split("|")
NEAR = "near|behind|under|beyond|beside|by".split("|")
DOES = (
    "looked at the {place}|walked to the {place}|waited {near} the {place}|sat down {near} the {place}|"
    "spoke of the {place}|swept the {place}|dreamed of the {place}|came back from the {place}|"
    "counted the stones {near} the {place}|sang {near} the {place}|lost an hour {near} the {place}"
).split("|")
ARRIVES = (
    "{name} came to the {place} {time}|{time} {name} stood {near} the {place}|it was {name} who opened the {place}|"
    "{near} the {place} somebody met {name}|the door of the {place} let in {name}|then there was {name}|"
    "people {near} the {place} talked about {name} {time}"
).split("|")
